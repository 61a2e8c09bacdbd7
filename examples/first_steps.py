"""Does the demo model learn in context the way layer-causal gradient descent would teach it?"""

import fairseq_icl as fi

model = fi.load_model("demo")
prompts = fi.build_prompts(model, "demo_sentiment", k=32, seed=1, limit=60)
zsl, icl = fi.observe(model, prompts), fi.observe(model, prompts, in_context=True)
with fi.fine_tuned(model, prompts, method="lcgd", lr=0.3) as tuned:
    ft = fi.observe(tuned, prompts)
table = fi.compare(prompts, zsl, icl, ft)
fi.plot_layers(table, "sim_aou", "sim_aou.png")
print(table[table["example"].isna() & table["layer"].isna()].to_string(columns=["metric", "value"], index=False))
