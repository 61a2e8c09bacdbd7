"""What can be done with the package; run from the clone, not installed with it."""
