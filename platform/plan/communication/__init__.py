"""The one communication rule: from layouts to the conversions and collectives of each operation, their sizes and their
legality. No code outside this package decides on communication."""
