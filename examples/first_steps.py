"""Does the demo model learn in context the way layer-causal gradient descent would teach it?"""

import fairseq_icl as fi

model = fi.load_model("demo")
prompts = fi.build_prompts(model, "demo_sentiment", k=32, seed=1, limit=60)
zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
with fi.fine_tuned(model, prompts, method="lcgd", lr=1.0) as tuned:
    table = fi.compare(prompts, zsl, icl, fi.observe(tuned, prompts))
means = table[table["example"].isna() & table["layer"].isna()].set_index("metric")["value"]
print(means[["accuracy_zsl", "accuracy_icl", "accuracy_ft", "rec2ftp", "sim_aou", "sim_am_delta"]].round(2).to_string())
fi.plot_layers(table, "sim_aou", "sim_aou.png")  # a notebook shows the figure by itself
