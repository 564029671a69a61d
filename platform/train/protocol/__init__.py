"""Protocol of a worker, as data: its replies to the driver's calls, and the texts that it is asked about. Imports no
torch, because the driver reads them."""
