"""How the model, tokenizer and datasets of `fairseq_icl/demo` were made: all of it by code in this folder.

    words.py         the vocabulary: groups of words, label words, template words
    grammar.py       groups of words -> sentences
    episodes.py      sentences -> small classification tasks, shown as demonstrations; the held-out tasks
    datasets.py      the held-out tasks -> the shipped datasets
    tokenizer.py     sentencepiece model and fairseq dictionary
    pretraining/     task and criterion, a plugin for `fairseq-train --user-dir`
    train.py         everything from nothing:     python -m examples.demo_model.train FOLDER
    evaluate.py      the tables of the document:  python -m examples.demo_model.evaluate

Recipe, curves and tables are in docs/demo_model.md. Nothing here is needed to use the shipped model.
"""

DEMO_DATASETS = ("demo_sentiment", "demo_subjectivity", "demo_topic", "demo_pairs")
"""Names of the held-out datasets."""
