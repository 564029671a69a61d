"""The last steps in host memory, with copies at peers, and recovery from what survivors hold.
Nothing here touches a storage.
"""
