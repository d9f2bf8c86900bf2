"""Options and parameter types shared by several verbs."""
