"""Answer questions with the help of a search engine: search, read, search again, answer."""
