"""Rows by index: of tables, and of tokens at the experts that compute them, in slots or packed"""
