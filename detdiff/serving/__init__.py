"""``detdiff serve``: an engine that takes requests while it runs, behind the OpenAI API."""
