"""docs/findings.md and the file of cells that it is made of: what the papers' claims look like on real models."""
