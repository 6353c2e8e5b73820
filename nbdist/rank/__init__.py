"""The code that hosts cells on a rank (rank)."""
