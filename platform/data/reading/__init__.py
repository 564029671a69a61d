"""Files of data: found by path, glob or URL, opened within bounds, and read as records"""
