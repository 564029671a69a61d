"""Answers of a worker to the driver's calls, as data. Imports no torch, because the driver reads them."""
