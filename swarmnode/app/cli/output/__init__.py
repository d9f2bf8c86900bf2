"""Output shared by several verbs."""
