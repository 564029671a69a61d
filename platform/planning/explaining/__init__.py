"""Explaining a plan before it runs: all that is known of it, as data, and what a failure would cost"""
