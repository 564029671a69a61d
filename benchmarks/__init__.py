"""Measurements, which print tables and assert no times. RESULTS.md has what they printed, with date and machine."""
