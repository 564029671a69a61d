"""What refusals name as nearest legal, or as a way to go on, is typed: it leads somewhere."""
