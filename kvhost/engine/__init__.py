"""What an engine is installed from: matrix, locks, bundles, packages. Makes files here."""
