"""Who executes a plan: the driver, its crew of workers (Ray, processes, torchrun, inline), and the run directory."""
