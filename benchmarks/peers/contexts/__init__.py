"""One Transformer block over two ranks that share the length: ours, torch's ring and plain PyTorch, in turn."""
