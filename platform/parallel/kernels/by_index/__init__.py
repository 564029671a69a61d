"""Rows by index: of tables, and of tokens in the slots of the experts that compute them"""
