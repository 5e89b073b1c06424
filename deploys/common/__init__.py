"""What every stage uses: the run's context, facts that fail closed, a few operations."""
