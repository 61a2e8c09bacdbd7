"""The papers' mathematics, executable: small pure modules, each with one statement, its formula and its limits.

| statement | module | source |
|---|---|---|
| a perceptron's weights are a sum over remembered examples | `dual_form` | Aizerman et al. 1964 |
| a layer trained by SGD is its old self plus linear attention to its examples | `dual_form` | Irie et al. 2022, arXiv 2202.05798 |
| linear attention to demonstrations is a change of weights, W_ZSL + dW_ICL | `linear_attention` | Dai et al. 2023, arXiv 2212.10559 |
| softmax attention: the change is a share of attention times a difference | `linear_attention` | follows from the softmax |
| a linear self-attention layer can be one step of gradient descent, or of GD++ | `construction` | von Oswald et al. 2023, arXiv 2212.07677 |
| trained on regression, one layer finds that step and deeper models find GD++ | `trained` | the same |
| the best layer makes a preconditioned step; on sequences, a step on all transitions so far | `descent` | Ahn et al. 2023, arXiv 2306.00297; von Oswald et al. 2023b, arXiv 2309.05858 |
| layers that attend by a kernel descend in its space of functions | `descent` | Cheng et al. 2024, arXiv 2312.06528 |
| a context is a rank-one change of the MLP's first matrix, per block and token | `implicit_update` | Dherin et al. 2025, arXiv 2507.16003 |
| momentum for attention: a decaying sum of earlier values | `models.attention` | Dai et al. 2023, section 5.2 |

`statements`, `trained`, `descent` and, on a real model, layer by layer, `on_decoder` run every statement, each also with a premise removed.
Functions that look at a model take its plain torch modules. Use float64: exact statements then hold to 1e-10 or better.
"""  # noqa: E501
