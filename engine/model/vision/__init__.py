"""Vision models: mlx-vlm's models on the engine's caches, and what their images become.

``processor`` runs in a worker process (``engine.workers``) and turns a text with images into token
ids and arrays of pixels. In the engine process, ``model`` gives mlx-vlm's models the form of
mlx-lm's, ``encoder`` computes the embeddings of images, some layers at a time beside the steps, and
``prompt_images`` says which embeddings and positions the tokens of a chunk have. Needs the extra
"vision".
"""
