"""An OpenAI-compatible HTTP front over the client: FastAPI and uvicorn, the extra `openai`."""

from dflash_trt.serving.openai.app import DONE, NOT_READY, Served, create_app, to_event
from dflash_trt.serving.openai.failures import Failure
from dflash_trt.serving.openai.page_routes import OPEN
