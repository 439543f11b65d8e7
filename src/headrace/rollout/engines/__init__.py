"""Who samples: one class per engine, each behind `protocols.TextEngine`, each built by a factory that is imported when used.

| kind | factory | what it is |
|---|---|---|
| native | `headrace.rollout.engines.native.engine:build_native` | the embedded engine: continuous batching over paged keys and values |
| hf | `headrace.rollout.engines.hf:build_hf` | the plain reference: one full Hugging Face forward pass for each token |
| scripted | `headrace.rollout.engines.scripted` | a scripted stand-in for tests and simulation |

Factories take ``(context, engine, model_folder, dtype, channel, kv_on_swap, *, inline=False)``. `sequences` holds what a
request grows into, `core` the life of requests and weights without threads or asyncio, `driver` the asynchronous face.
"""
