"""What a plan needs on a device: a forward pass run on storages without memory, added up along a schedule's row.
No device is asked here.
"""
