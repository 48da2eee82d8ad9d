"""`tvr serve`: an OpenAI-compatible server around one engine. Needs the extra `serve`."""
