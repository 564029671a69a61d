"""What a rank holds, as blocks of global tensors, and buffers of their bytes.
Nothing here reads or writes a storage.
"""
