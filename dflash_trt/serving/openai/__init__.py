"""An OpenAI-compatible HTTP front over the client: FastAPI and uvicorn, the extra `openai`."""
