"""Peers: other systems that train the same model on the same batches, stepped alternately with ours in one launch."""
