"""A tiny BERT with random weights and a vocabulary of single words, saved as sentence-transformers save models."""

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(50)]
MAX_LENGTH = 24
NUM_DIMENSIONS = 16


def save_model(folder, *, normalises=True, seed=0):
    """Saves the model; returns its folder."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = Path(folder)
    pooling = folder / "1_Pooling"
    pooling.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "passage", ":", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=NUM_DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=1.0,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH}))
    (pooling / "config.json").write_text(
        json.dumps({"word_embedding_dimension": NUM_DIMENSIONS, "pooling_mode_mean_tokens": True})
    )
    names = ["Transformer", "Pooling", "Normalize"][: 2 + normalises]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def oracle(folder, text, *, normalises=True, max_length=MAX_LENGTH):
    """The vector of one text, by transformers alone: the mean over its tokens."""
    import torch
    from transformers import BertModel, BertTokenizerFast

    tokenizer, model = BertTokenizerFast.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        tokens = tokenizer([text], return_tensors="pt", truncation=True, max_length=max_length)
        vector = model(**tokens).last_hidden_state[0].mean(dim=0)
    return (vector / vector.norm() if normalises else vector).numpy()


def make_texts(num_texts, seed=0):
    """Texts of 1 to 40 words, some longer than the model reads."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 40))) for _ in range(num_texts)]
