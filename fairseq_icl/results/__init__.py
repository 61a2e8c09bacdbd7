"""Results: the tidy table and its file, the gradient record, intervals and drawings. Reading them needs no torch."""

from fairseq_icl.results.gradient_record import (
    GRADIENT_COLUMNS,
    heatmap_matrix,
    read_gradient_record,
    step_size_matrix,
    whole_layer_matrix,
    write_gradient_record,
)
from fairseq_icl.results.table import (
    COLUMNS,
    CURVE_COLUMNS,
    LENGTH_RATIO,
    Rows,
    means,
    provenance,
    read_curve,
    read_examples,
    read_means,
    read_results,
    text_table,
    write_curve,
    write_results,
)
