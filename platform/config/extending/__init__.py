"""Code of the user's own: its modules are imported, and the settings that it declares are checked."""
