"""Tables of measured runs: read, written from runs, and compared with predictions"""
