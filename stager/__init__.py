"""Public names are added as the rooms are built."""
