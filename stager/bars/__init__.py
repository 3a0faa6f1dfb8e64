"""Bar files to bars: which columns are which, what is wrong, and everything sorted by symbol and time."""
