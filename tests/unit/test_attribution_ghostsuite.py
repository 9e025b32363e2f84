"""GhostSuite's .pt logs: the conversion against its definition. n = 3 examples, V = 2 validation rows, T = 5 tokens."""

import json

import numpy as np
import pytest

from maxghost import attribution, report, scores
from maxghost.config import ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def logs(tmp_path):
  """Two files of two iterations each; label -1 does not count. Returns (folder, true <g_i, G>, tokens)."""
  folder = tmp_path / "run" / "grad_dotprods"
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  val_labels = torch.ones(2, 5, dtype=torch.long)
  val_labels[1, 3:] = -1
  torch.save({"X_val": val_labels, "Y_val": val_labels}, folder / "valset.pt")
  true, all_tokens = [], []
  for last in (1, 3):
    entries = []
    for step in (last - 1, last):
      labels = torch.ones(3, 5, dtype=torch.long)
      labels[0, : step + 1] = -1
      tokens = (labels >= 0).sum(1).numpy()
      dot = rng.normal(size=3)
      logged = dot * tokens * 8 / (tokens.sum() + 8) ** 2
      entries.append(
        {
          "dot_product": torch.tensor(logged, dtype=torch.float32),
          "X_train": labels,
          "Y_train": labels,
          "iter_num": step,
          "batch_idx": torch.tensor([7 * step, 7 * step + 1, 3]),
        }
      )
      true.append(dot)
      all_tokens.append(tokens)
    torch.save(entries, folder / f"dot_prod_log_iter_{last}.pt")
  return folder, np.concatenate(true), np.concatenate(all_tokens)


def test_conversion_undoes_the_scale_of_the_log(logs):
  folder, dot, tokens = logs
  for place in (folder, folder.parent, folder.parent.parent):
    log = attribution.load(place)
    np.testing.assert_allclose(log["dot"][:, 0], dot, rtol=1e-5)
    np.testing.assert_array_equal(log["tokens"], tokens)
    np.testing.assert_array_equal(log["step"], np.repeat(np.arange(4), 3))
    share = tokens / np.repeat(tokens.reshape(4, 3).sum(1), 3)
    np.testing.assert_allclose(log["contribution"][:, 0], dot * share, rtol=1e-5)
    np.testing.assert_allclose(attribution.load(place, ghostsuite_scale=16.0)["dot"][:, 0], 16 * dot, rtol=1e-5)
    assert log["offset"].tolist()[:3] == [0, 1, 3] and "no learning rate" in log.messages[0]


def test_query_and_report_work(logs, capsys):
  folder = logs[0]
  assert scores.main([str(folder), "--by", "document", "--format", "json"]) == 0
  rows = json.loads(capsys.readouterr().out)["rows"]
  assert {row["offset"]: row["chunks"] for row in rows}[3] == 4 and len(rows) == 9
  assert report.main([str(folder)]) == 0
  out = " ".join(capsys.readouterr().out.split())
  assert "What the training examples were worth" in out and (folder / "report.html").exists()
  assert "This log holds neither predicted nor measured drops" in out
  assert "Predicted drop" not in out and "0 steps." not in out


def test_bare_numbers_of_early_versions(tmp_path):
  torch.save(torch.arange(6.0).reshape(2, 3), tmp_path / "dot_prod_log_iter_9.pt")
  log = attribution.load(tmp_path)
  assert log["step"].tolist() == [8, 8, 8, 9, 9, 9]
  np.testing.assert_allclose(log["dot"][:, 0], np.arange(6) * 16)  # n = 3, V = 1: (n + V)^2 / V
  assert any("valset.pt is missing" in m for m in log.messages) and any("one token" in m for m in log.messages)


@pytest.mark.parametrize("number", [torch.tensor, lambda number: torch.tensor([number]), int])
def test_the_rows_of_a_numbered_batch_are_separate_documents(tmp_path, number, capsys):
  entries = [{"dot_product": torch.arange(3.0), "iter_num": step, "batch_idx": number(step % 2)} for step in range(4)]
  torch.save(entries, tmp_path / "dot_prod_log_iter_3.pt")
  assert scores.main([str(tmp_path), "--by", "document", "--format", "json"]) == 0
  rows = json.loads(capsys.readouterr().out)["rows"]
  found = {(row["path"], row["offset"]): row["chunks"] for row in rows}
  assert found == {(f"batch_idx {batch}", row): 2 for batch in range(2) for row in range(3)}


def test_a_batch_index_of_the_wrong_length_is_said(logs):
  entry = {"dot_product": torch.arange(3.0), "iter_num": 1, "batch_idx": torch.tensor([1, 2])}
  torch.save([entry], logs[0] / "dot_prod_log_iter_1.pt")
  messages = attribution.load(logs[0]).messages
  assert any("iter_num 1 has 3 scores, but a batch_idx of 2 entries" in m for m in messages)


def test_damaged_file_is_skipped_and_said(logs):
  folder, dot, _ = logs
  (folder / "dot_prod_log_iter_1.pt").write_bytes(b"not a torch file")
  log = attribution.load(folder)
  np.testing.assert_allclose(log["dot"][:, 0], dot[6:], rtol=1e-5)
  assert any(m.startswith("skipped dot_prod_log_iter_1.pt") for m in log.messages)
  (folder / "dot_prod_log_iter_3.pt").write_bytes(b"")
  with pytest.raises(ConfigError, match="none of GhostSuite's logs is readable"):
    attribution.load(folder)


def test_without_torch_it_says_what_to_install(logs, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "torch", None)
  with pytest.raises(ConfigError, match="pip install torch"):
    attribution.load(logs[0])
