"""Services, a file for each: how a run's numbers, events and alerts are sent to it by its own package."""
