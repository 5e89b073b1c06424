"""What the controller keeps of runs: journals, receipts, and what has drifted since."""
