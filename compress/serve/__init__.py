"""The HTTP server: OpenAI's interface, metrics and a small page over one engine.

A call goes through `app.py` (routes), `completions.py` or `chat.py` (what its body asks for and how its
answer is written), `engine_thread.py` (the one thread that runs the engine, with a fair queue before it)
and `choice.py` (one text on its way back). `server.py` starts and stops it all.
"""
