"""Weights of models that transformers saves, in and out: what their config.json and names mean, as data, and their
bytes, block by block.

Its files in reading order: config_keys, llama, deepseek, relatives, qwen_next, encoders, families, tensor_names,
quantised, model_folder, stored_adapters, importing, exporting, peft_format.
"""

FROM_HF = "from_hf"  # model.kind in conf/model/from_hf.yaml, until the model's source says it
