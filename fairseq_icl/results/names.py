"""How metrics are called in figures."""

SIMILARITIES = ("sim_aou", "sim_aou_norm", "sim_am_after", "sim_am_delta")
NAMES = {
    "sim_aou": "SimAOU",
    "sim_aou_norm": "SimAOU_norm",
    "sim_am_after": "SimAM",
    "sim_am_delta": "SimAM_delta",
    "alpha": "alpha",
}
