# A LLaMA that should sink: Gu et al. (2024) see 32 % of heads sink at this learning rate, 41 % at this decay.
# They need more than 100M unique tokens, so text of the network, which `datasets` writes as JSON lines:
# load_dataset("Skylion007/openwebtext", split="train").to_json("openwebtext.jsonl")
out = "runs/llama_60m"
model = "llama_60m"
source = ("openwebtext.jsonl",)  # theirs is the Pile
tokenizer = "bpe:32000"
sequence_length = 2048
global_batch_size = 128  # x 2048 = 262,144 tokens a step
micro_batch_size = 32
learning_rate = 8e-4
weight_decay = 0.5
warmup_iters = 500
max_iters = 10_000
eval_every = 250
save_every = 250
keep = "last"
track_sinks = True
