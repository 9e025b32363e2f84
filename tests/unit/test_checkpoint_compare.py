"""The comparator: equal across layouts, and every kind of difference found and named."""

import json

import numpy as np
import pytest
from checkpoint_convert_trees import E, L, linen, nnx, save, unpack, wrap

from maxghost.adapters import quantized
from maxghost.checkpoint import inspect_checkpoint
from maxghost.checkpoint.compare import ONLY_LEFT, compare_checkpoints, main
from maxghost.interop.convert import convert


def silent(_):
  pass


def kinds(result):
  return [(row.path, row.kind) for row in result.rows]


@pytest.fixture
def pair(tmp_path):
  """save(a), save(b) and compare; returns the comparison."""

  def compare(a, b, **options):
    save(tmp_path / "a", a)
    save(tmp_path / "b", b)
    return compare_checkpoints(tmp_path / "a", tmp_path / "b", **options)

  return compare


def test_every_layout_of_one_checkpoint_is_equal(tmp_path):
  source = unpack("linen_scanned", tmp_path)
  targets = {
    "nnx": {"to": "nnx"},
    "wrapped": {"to": "nnx", "wrapped": True, "layers": "integer"},
    "ours": {"to": "maxghost"},
    "unscanned": {"to": "linen", "layers": "unscanned"},
    "axis0": {"to": "nnx", "scan_axis": 0},
  }
  for name, options in targets.items():
    convert(source, tmp_path / name, verify=False, say=silent, **options)
    result = compare_checkpoints(source, tmp_path / name)
    assert result.equal and result.num_arrays == 39, name
    assert result.num_elements == 3 * 5028 + 3


def test_another_initialisation_is_different(tmp_path):
  a, b = unpack("linen_scanned", tmp_path), unpack("linen_unscanned", tmp_path)
  result = compare_checkpoints(a, b)
  assert {row.kind for row in result.rows} == {"value"} and len(result.rows) == 36  # counts and step agree
  assert ("step", "value") not in kinds(result)


def test_a_single_moment_of_a_single_layer(pair):
  a, b = linen("scanned"), nnx("scanned")
  nu = b["optimizer"]["opt_state"]["0"]["nu"]["decoder"]["layers"]["MoeBlock_0"]["gate"]["kernel"]
  nu[4, 1, 2] += 1
  result = pair(a, b)
  assert kinds(result) == [("opt_state/0/nu/decoder/layers/MoeBlock_0/gate/kernel", "value")]
  (row,) = result.rows
  assert (row.layers, row.first_index, row.num_different) == ([1], [4, 2], 1)
  np.testing.assert_allclose([row.max_abs, row.max_rel], [1, 1 / abs(nu[4, 1, 2])], rtol=1e-5)


@pytest.mark.parametrize(
  ("change", "row"),
  [
    (lambda t: t["params"]["params"]["decoder"].pop("decoder_norm"), ("params/decoder/decoder_norm/scale", ONLY_LEFT)),
    (lambda t: t["opt_state"][2].update(count=np.int32(8)), ("opt_state/2/count", "value")),
    (lambda t: t["opt_state"][2].update(count=np.int64(9)), ("opt_state/2/count", "dtype")),
    (lambda t: t.update(step=np.int32(10)), ("step", "value")),
    (lambda t: t["opt_state"][0].pop("nu"), ("opt_state/0/nu/decoder/decoder_norm/scale", ONLY_LEFT)),
  ],
)
def test_each_kind_of_difference(change, row, pair):
  b = linen("unscanned")
  change(b)
  if row[1] == ONLY_LEFT and row[0].startswith("params"):  # the moments follow their parameter
    for moment in ("mu", "nu"):
      b["opt_state"][0][moment]["params"]["decoder"].pop("decoder_norm")
  result = pair(linen("unscanned"), b)
  assert row in kinds(result)
  assert {kind for _, kind in kinds(result)} == {row[1]}


def test_shapes_dtypes_and_layers(pair):
  def tree(scale, num_layers=2):
    layers = {f"layers_{i}": {"w": np.full(3, i, np.float32)} for i in range(num_layers)}
    return {"params": {"params": {"decoder": {**layers, "norm": {"scale": scale}}}}}

  result = pair(tree(np.ones(4, np.float32), 3), tree(np.ones(5, np.float64), 2))
  assert [row.text() for row in result.rows] == [
    "only-left  params/decoder/layers/w (layers 2)  float32[3]",
    "shape      params/decoder/norm/scale  float32[4] against float64[5]",
    "dtype      params/decoder/norm/scale  float32 against float64",
  ]


def test_tolerances_are_scaled_by_the_array(pair, tmp_path):
  """A second moment of 3e-6 that is off by 1e-7 does not pass an absolute tolerance of 1e-5."""
  a = {"params": {"params": {"decoder": {"w": np.array([1.0, -2.0])}}}}
  a["opt_state"] = [{"nu": {"params": {"decoder": {"w": np.array([3e-6, 0.0])}}}}]
  b = json.loads(json.dumps(a, default=lambda x: x.tolist()))
  b["params"]["params"]["decoder"]["w"] = np.array([1.0 + 1e-5, -2.0])
  b["opt_state"][0]["nu"]["params"]["decoder"]["w"] = np.array([3.1e-6, 0.0])
  assert len(pair(a, b).rows) == 2
  again = {"atol": 1e-5}
  assert kinds(compare_checkpoints(tmp_path / "a", tmp_path / "b", **again)) == [("opt_state/0/nu/decoder/w", "value")]
  assert len(compare_checkpoints(tmp_path / "a", tmp_path / "b", rtol=2e-5).rows) == 1
  assert compare_checkpoints(tmp_path / "a", tmp_path / "b", rtol=0.04).equal
  assert compare_checkpoints(tmp_path / "a", tmp_path / "b", params_only=True, **again).equal


def test_nans_zeros_and_infinities(pair, tmp_path, capsys):
  def tree(*values):
    return {"params": {"params": {"decoder": {"w": np.array(values, np.float32)}}}}

  result = pair(tree(np.nan, np.nan, 0.0, np.inf, 1.0), tree(np.nan, 1.0, -0.0, -np.inf, 1.0))
  (row,) = result.rows
  assert (row.num_different, row.first_index, result.num_nans) == (3, [1], 1)
  assert row.max_abs == np.inf
  assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
  (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]  # JSON has no Infinity
  assert row["max_abs"] is None


def test_a_difference_from_zero_is_infinite_relative_to_it(pair, tmp_path, capsys):
  tree = lambda value: {"params": {"params": {"decoder": {"w": np.array([1, value], np.float32)}}}}  # noqa: E731
  assert "largest difference 3 (relative inf)" in pair(tree(3), tree(0)).rows[0].text()
  assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
  (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
  assert (row["max_abs"], row["max_rel"]) == (3, None)


def test_equal_nans_are_equal_and_counted(pair, tmp_path):
  tree = {"params": {"params": {"decoder": {"w": np.array([np.nan, 2.0, np.nan], np.float16)}}}}
  result = pair(tree, tree)
  assert result.equal and result.num_nans == 2


def test_random_state_is_compared_on_request_by_what_it_is(tmp_path):
  a = unpack("nnx_scanned", tmp_path)
  convert(a, tmp_path / "b", drop_rngs=True, say=silent)
  result = compare_checkpoints(a, tmp_path / "b")
  assert result.equal and result.notes == ["not compared: 30 random-state leaves on the left (--rngs compares them)"]
  rows = compare_checkpoints(a, tmp_path / "b", rngs=True).rows
  assert len(rows) == 30 and {row.kind for row in rows} == {"only-left"}
  tree = nnx()
  tree["model"]["decoder"]["layers"]["burngate"] = {"kernel": np.ones((E, L, 2))}
  save(tmp_path / "c", tree)
  save(tmp_path / "d", nnx())
  assert len(compare_checkpoints(tmp_path / "c", tmp_path / "d").rows) == 1


def test_blocks_give_the_same_answer(tmp_path):
  b = linen("scanned")
  b["params"]["params"]["decoder"]["layers"]["MoeBlock_0"]["wo"][5, 2, 6, 4] += 1
  save(tmp_path / "a", linen("scanned"))
  save(tmp_path / "b", b)
  whole = compare_checkpoints(tmp_path / "a", tmp_path / "b")
  blocks = compare_checkpoints(tmp_path / "a", tmp_path / "b", ram_bytes=480)
  assert whole == blocks and whole.rows[0].first_index == [5, 6, 4]


def test_exit_codes_json_and_rows(tmp_path, capsys):
  save(tmp_path / "a", linen())
  save(tmp_path / "b", wrap(nnx()))
  save(tmp_path / "c", linen(seed=1))
  a, b, c = (str(tmp_path / name) for name in "abc")
  assert main([a, b]) == 0
  assert capsys.readouterr().out.endswith("CHECKPOINTS MATCH\n")
  assert main([a, c, "--max_rows", "2"]) == 1
  printed = capsys.readouterr().out
  assert "... and 28 more differences" in printed and "CHECKPOINTS DIFFER: 30 differences" in printed
  assert len(printed.splitlines()) == 5
  assert main([a, c, "--json", "--params_only"]) == 1
  content = json.loads(capsys.readouterr().out)
  assert content["equal"] is False and len(content["rows"]) == 10
  assert set(content["rows"][0]) >= {"path", "kind", "max_abs", "max_rel", "first_index"}
  assert main([a, str(tmp_path / "nothing")]) == 2
  assert capsys.readouterr().err == f"compare_checkpoints: there is no checkpoint folder {tmp_path / 'nothing'}\n"
  for name, value in (("--atol", "-1"), ("--rtol", "nan"), ("--max_rows", "-1")):
    assert main([a, b, name, value]) == 2
    assert capsys.readouterr().err.startswith(f"compare_checkpoints: {name} {value}")


def test_inspect_lists_every_leaf(tmp_path, capsys):
  source = unpack("nnx_unscanned", tmp_path)
  content = inspect_checkpoint.inspect(source)
  sizes = {leaf["path"]: (leaf["shape"], leaf["dtype"], leaf["bytes"]) for leaf in content["leaves"]}
  assert sizes["params/params/decoder/layers_1/self_attention/query/kernel"] == ([12, 6, 4], "float32", 1152)
  assert sizes["nnx_aux/model/decoder/dropout/rngs/aqt/key"] == ([4], "key<unsafe_rbg>", 16)
  assert sizes["opt_state/1"] == (None, "None", 0)
  assert content["parameters"] == 5028 and content["layout"] == "linen" and content["step"] == 3
  assert content["containers"] == {"decoder/layers": {"form": "unscanned", "layers": 3}}
  assert inspect_checkpoint.main([str(source)]) == 0
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == 142 + 3 and printed[142] == f"142 leaves, {content['bytes']:,} bytes"
  save(tmp_path / "odd", {"body": {"kernel": np.ones(3)}})
  assert inspect_checkpoint.main([str(tmp_path / "odd"), "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["layout"] == ""
  assert inspect_checkpoint.main([str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize("qtype", ["int8", "nf4", "int4"])
def test_inspect_counts_the_parameters_of_a_quantised_matrix(tmp_path, qtype):
  """Its codes, of which a byte may hold two; not the sizes of its blocks, and a scale that is one of the model."""
  parts = quantized.quantize(np.ones((3, 8, 5), np.float32), qtype, 1, 1)
  experts = {f"wi_0_{name}": part for name, part in parts.items()}
  layers = {"query": parts | {"bias": np.ones((3, 5))}, "moe": experts, "norm": {"scales": np.ones((3, 8))}}
  save(tmp_path / "few", {"model": {"decoder": {"layers": layers}}})
  assert inspect_checkpoint.inspect(tmp_path / "few")["parameters"] == 3 * (2 * 8 * 5 + 5 + 8)
