"""`fdg.play`: video formats, rendering of each kind of environment, captions, errors."""

import contextlib
import os
import resource
import subprocess

import numpy as np
import pytest
from PIL import Image, ImageSequence

import envs
import fdg
from envs.rendering import Episode, frames
from fdg import files
from fdg.errors import FdgError
from fdg.play import main as play_main
from fdg.plot import main as plot_main
from fdg.training import playing
from tests.envs import thermostat
from tests.training.trained import fitted, small


def read_frames(path):
    with Image.open(path) as image:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("runs") / "a2c", small("a2c", hidden=(8,)), iterations=1)


def test_gif_of_two_episodes(run, capsys):
    out = run.path / "video.gif"
    assert play_main([str(run.path), "--episodes", "2", "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    images = read_frames(out)
    # As long as the longer of the two episodes with this seed.
    import jax

    played = playing.play_episodes(run.algorithm, run.state, jax.random.key(3), 2, True, 1000)
    assert all(episode.finished for episode in played)
    assert len(images) == max(len(episode.reward) for episode in played)
    assert np.abs(images[0].astype(int) - images[5]).max() > 50
    height, width, _ = images[0].shape
    assert width > 2 * height  # 600 x 400 each
    assert play_main([str(run.path), "--out", "video.avi"]) == 2
    assert "give a video a file name that ends in .mp4, .gif or .html" in capsys.readouterr().err


def test_mp4(run, tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
    out = run.play(tmp_path / "video.mp4", max_steps=8, seed=1)
    decoded = subprocess.run(
        [ffmpeg, "-i", str(out), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True
    )
    images = np.frombuffer(decoded.stdout, np.uint8).reshape(-1, 418, 600, 3)
    assert len(images) == 8 and np.abs(images[0].astype(int) - images[-1]).max() > 50


@contextlib.contextmanager
def full_disk(limit=1000):
    """A limit in bytes on the size of files, as a full disk would set."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", ["video.gif", "video.mp4", "video.html", "policy.jax", "plot.png"])
def test_full_disk_leaves_no_file(run, tmp_path, capsys, name):
    if name == "video.mp4":
        pytest.importorskip("imageio_ffmpeg")
    out = tmp_path / "earlier" / name
    out.parent.mkdir()
    out.write_text("earlier")
    with full_disk():
        if name == "plot.png":
            assert plot_main([str(run.path), "--out", str(out)]) == 2
            assert f"{out} cannot be written: File too large" in capsys.readouterr().err
        else:
            write = run.export if name == "policy.jax" else lambda path: run.play(path, max_steps=3)
            with pytest.raises(FdgError, match=f"{name} cannot be written: "):
                write(out)
    assert [(path.name, path.read_text()) for path in out.parent.iterdir()] == [(name, "earlier")]


def test_written_files_keep_their_permissions(tmp_path, monkeypatch):
    path = tmp_path / "policy.onnx"
    path.write_text("earlier")
    path.chmod(0o600)
    with files.writing(path) as file:
        file.write(b"new")
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(files, "refusal", lambda path: OSError() if path == tmp_path else None)
    inode = path.stat().st_ino
    with files.writing(path) as file:  # a writable file in a folder that is not
        file.write(b"newer")
    assert path.read_text() == "newer" and path.stat().st_ino == inode
    monkeypatch.undo()
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    calls, open_file = [], os.open
    monkeypatch.setattr(os, "open", lambda *arguments: calls.append(arguments) or open_file(*arguments))
    with files.writing(path) as file:  # another user's file in a sticky folder
        file.write(b"newest")
    assert path.read_text() == "newest" and path.stat().st_ino == inode
    ((_, flags),) = calls
    assert not flags & os.O_CREAT  # which Linux refuses here, if fs.protected_regular is set


def test_mp4_over_a_file_that_cannot_be_replaced(run, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "video.mp4"
    path.touch()
    monkeypatch.setattr(files, "refusal", lambda folder: OSError() if folder == tmp_path else None)
    size = run.play(path, max_steps=3).stat().st_size
    assert size > 1000 and list(tmp_path.iterdir()) == [path]
    with full_disk(), pytest.raises(FdgError, match=r"video.mp4 cannot be written: "):
        run.play(path, max_steps=3)
    assert path.stat().st_size == size


def test_mp4_whose_name_looks_like_an_address(run, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    monkeypatch.chdir(tmp_path)
    assert run.play("CartPole:v1.mp4", max_steps=3).stat().st_size > 1000


def test_html(run, tmp_path):
    text = run.play(tmp_path / "video.html", max_steps=3).read_text()
    assert "data:image/gif;base64," in text and "<title>CartPole-v1" in text


def test_gymnasium_renderer():
    pytest.importorskip("pygame")
    env = envs.make("gymnasium:CartPole-v1")
    observations = []

    def act(observation, step):
        observations.append(observation)
        return np.int32(step % 2)

    (episode,) = env.source.record(act, 1, 8, 5)
    images = list(frames(env, episode))
    assert len(images) == len(observations) == len(episode.reward) == 8 and not episode.finished
    assert images[0].shape == (400, 600, 3) and (images[0] != images[-1]).any()
    assert episode.observation.shape == (8, 4)


@pytest.mark.parametrize(
    ("name", "rendered"),
    [("thermostat:Thermostat", None), ("thermostat:Thermostat", "text"), ("thermostat:make_thermostat", None),
     ("parted:Parted", ...)],
)  # fmt: skip
def test_observations_of_gymnasium_are_drawn_without_a_renderer(monkeypatch, name, rendered):
    """Only `Thermostat` takes `render_mode`; `Parted` has no method `render`, and parts."""
    monkeypatch.setattr(thermostat.Thermostat, "render", lambda self: rendered)
    env = envs.make(f"tests.envs.{name}", max_episode_steps=3)
    (episode,) = env.source.record(lambda observation, step: np.int64(1), 1, 9, 5)
    images = list(frames(env, episode))
    assert len(images) == len(episode.reward) and images[0].shape[0] > 300 and images[0].std() > 5


def test_episode_of_gymnasium_has_encoded_observations(monkeypatch):
    monkeypatch.setattr(thermostat.Thermostat, "observation_space", thermostat.spaces.MultiDiscrete([4]))
    monkeypatch.setattr(thermostat.Thermostat, "render", lambda self: None)
    env = envs.make("tests.envs.thermostat:Thermostat")
    (episode,) = env.source.record(lambda observation, step: np.int64(1), 1, 9, 5)
    assert episode.observation.tolist() == np.eye(4)[:3].tolist()


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 2), (4, 6, 3), (4, 6, 4)])
def test_render_method(shape):
    class Single:
        def render(self, state):
            return np.full(shape, state / 10)

    class Env:
        name, single = "mine", Single()

    episode = Episode([1, 2], np.zeros((2, 1)), np.zeros(2), np.ones(2), True)
    first, second = frames(Env(), episode)
    assert (
        first.shape == (4, 6, 3) and first.dtype == np.uint8 and first[0, 0, 0] == 25 and (second == 51).all()
    )

    class Broken(Single):
        def render(self, state):
            raise OSError("no display")

    Env.single = Broken()
    with pytest.raises(FdgError, match="mine cannot be rendered: OSError: no display"):
        next(frames(Env(), episode))


@pytest.mark.parametrize("settings", [{"episodes": 0}, {"fps": 0}, {"max_steps": 1.5}])
def test_invalid_arguments(run, tmp_path, settings):
    with pytest.raises(FdgError, match=f"{next(iter(settings))}=.*: give an integer"):
        run.play(tmp_path / "video.gif", **settings)


def test_language_algorithms_cannot_play():
    class Speaker:
        def examples(self, state, key, count):
            return ()

    with pytest.raises(FdgError, match="Speaker cannot play: it generates text"):
        fdg.Run(Speaker(), {}, 0).play("video.gif")


def test_host_episodes_depend_on_the_key(monkeypatch):
    """`Source.record` gets another seed for each key."""
    import jax

    class Source:
        def record(self, act, episodes, limit, seed):
            return episodes, limit, seed

    class Algorithm:
        class env:
            source, max_episode_steps = Source(), None

    monkeypatch.setattr(playing, "Acting", lambda *words: words)
    seeds = {playing.play_episodes(Algorithm, {}, jax.random.key(i), 2, True, 9) for i in range(3)}
    assert len(seeds) == 3 and {one[:2] for one in seeds} == {(2, 9)}
    assert max(seed for *_, seed in seeds) > 2**20


def test_caption(monkeypatch):
    from PIL import ImageDraw

    class Single:
        def render(self, state):
            return np.zeros((4, 6, 3), np.uint8)

    class Env:
        name, single = "mine", Single()

    captions = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, fill: captions.append(text))
    episode = Episode([0, 0], np.zeros((2, 1)), np.zeros(2), np.array([1.5, 2.0]), True)
    for greedy in (True, False):
        assert len(list(playing._joint_frames(Env(), [episode], greedy))) == 2
    words = ["greedy, step 1, return 1.5", "greedy, step 2, return 3.5"]
    assert captions == [*words, *(word.replace("greedy", "sampled") for word in words)]
