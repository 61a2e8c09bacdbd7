"""The curve of a pretraining log."""

from examples.demo_model.train import plot_curve, read_log

LOG = """\
x | INFO | train_inner | epoch 001: 1 / 49 loss=9, label_loss=5.28, text_loss=6, level=0, wps=1, num_updates=50, lr=0.1
x | INFO | demo_topic | epoch 001 | valid on 'demo_topic' subset | loss 7 | accuracy_k16 0.4 | level 0 | num_updates 50
x | INFO | train_inner | epoch 002: 1 / 49 loss=4, label_loss=2.5, text_loss=3, level=1, wps=1, num_updates=100, lr=0.1
x | INFO | demo_topic | epoch 002 | valid on 'demo_topic' subset | loss 3 | accuracy_k16 1 | level 1 | num_updates 100
"""


def test_losses_levels_and_held_out_accuracies_are_read():
    training, held_out = read_log(LOG)
    assert training == [(50, 5.28, 0), (100, 2.5, 1)]
    assert held_out == {"demo_topic": [(50, 0.4), (100, 1.0)]}


def test_curve_is_a_picture(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    plot_curve(tmp_path / "train.log", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
