"""Operands in panels that ranks pass on: SUMMA, and attention to keys and values of other ranks"""
