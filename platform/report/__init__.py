"""The page of a run: `python -m platform.report` writes it as one HTML file, or serves it as the run goes on. The
headlines, shares of time, news and curves that it shows are made here.

Its files in reading order: account, page, page_data, page_server.
"""
