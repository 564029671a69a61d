"""Profiles of training steps: recorded by workers, merged into one trace"""
