"""What a user may choose: every key with its type and default, its bounds, and how keys go together.
Nothing here composes files, plans or starts anything: a configuration that is wrong is refused by what lives here.
"""
