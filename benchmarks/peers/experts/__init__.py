"""One layer of experts over two ranks: ours, megatron-core's and a plain PyTorch layer, stepped alternately."""
