"""Pods of an Indexed Job of Kubernetes, which run a training by torchrun, without Ray."""
