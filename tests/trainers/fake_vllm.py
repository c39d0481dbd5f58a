"""A fake of `vllm serve` on the loopback interface, and of the packages TRL's client wants to talk to it.

The HTTP side of TRL's `VLLMClient` runs as it is. Replaced are what needs other packages or a GPU: the `requests`
package, vLLM's NCCL group (the weights are handed over in memory), and the check that the trainer's device is CUDA.
The server generates with a stock transformers model that holds exactly the weights it was sent.
"""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
import trl.generation.vllm_client as vllm_client
import trl.generation.vllm_generation as vllm_generation


class Response:
    def __init__(self, status_code, body, headers):
        self.status_code, self.text, self.headers = status_code, body.decode(), headers

    def json(self):
        return json.loads(self.text)


class RequestException(OSError):
    pass


def _request(url, json_body=None, method="GET"):
    data = None if json_body is None else json.dumps(json_body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return Response(reply.status, reply.read(), reply.headers)
    except urllib.error.HTTPError as error:
        return Response(error.code, error.read(), error.headers)
    except OSError as error:
        raise RequestException(str(error)) from error


class Session:
    def mount(self, prefix, adapter):
        pass

    def get(self, url, params=None):
        return _request(url)

    def post(self, url, json=None):
        return _request(url, json, "POST")


class VLLMServer:
    """Answers as `vllm serve` with a weight-transfer engine.

    Attributes:
        updates: One list of `(name, dtype, shape)` for each weight update, as announced.
        requests: The bodies sent to `/v1/completions`.
    """

    def __init__(self, model):
        self.model = model.eval()
        self.updates, self.requests, self.arriving = [], [], {}
        self.arrived = threading.Event()
        handler = type("Handler", (_Handler,), {"vllm": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.http.shutdown()
            self.http.server_close()
            thread.join()

    def receive(self, iterator, group, src, post_iter_func):
        """In place of `packed_nccl_broadcast_producer`."""
        for item in iterator:
            self.arriving[item[0]] = post_iter_func(item).detach().clone()
        self.arrived.set()

    def get(self, path):
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {
                "vllm_config": {
                    "weight_transfer_config": {"backend": "nccl"},
                    "model_config": {"logprobs_mode": "processed_logprobs"},
                }
            },
        }.get(path)

    def post(self, path, body):
        if path == "/v1/completions":
            return {"choices": self.complete(body)}
        if path == "/start_weight_update":
            self.arriving.clear()
            self.arrived.clear()
        elif path == "/update_weights":
            info = body["update_info"]
            self.updates.append(list(zip(info["names"], info["dtype_names"], map(tuple, info["shapes"]))))
            assert self.arrived.wait(60)
        elif path == "/finish_weight_update":
            self.load()
        elif path not in ("/init_weight_transfer_engine", "/reset_prefix_cache"):
            return None
        return {"success": True}

    def load(self):
        """Puts the weights that came into the model, and insists that they are what was announced and all of it."""
        announced = [(name, dtype, shape) for name, dtype, shape in self.updates[-1]]
        came = [(name, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in self.arriving.items()]
        assert came == announced
        own = dict(self.model.named_parameters())  # tied weights once, as vLLM wants them
        assert self.arriving.keys() == own.keys(), self.arriving.keys() ^ own.keys()
        with torch.no_grad():
            for name, value in self.arriving.items():
                own[name].copy_(value)

    @torch.no_grad()
    def complete(self, body):
        self.requests.append(body)
        choices = []
        with torch.random.fork_rng(devices=[]):  # the trainer's random numbers stay what they are
            torch.manual_seed(len(self.requests))
            for prompt in body["prompt"]:
                for _ in range(body["n"]):
                    choices.append(self._choice(prompt, body))
        return choices

    def _choice(self, prompt, body):
        ids = torch.tensor([prompt])
        tokens, log_probs = [], []
        while len(tokens) < body["max_tokens"]:
            logits = self.model(input_ids=ids).logits[0, -1].float() / body["temperature"]
            token = int(torch.multinomial(logits.softmax(-1), 1))
            tokens.append(token)
            log_probs.append(float(logits.log_softmax(-1)[token]))
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
            if token == self.model.config.eos_token_id:
                break
        names = [f"token_id:{token}" for token in tokens]
        top = [{name: value} for name, value in zip(names, log_probs)]
        logprobs = {"tokens": names, "token_logprobs": log_probs, "top_logprobs": top}
        return {"prompt_token_ids": prompt, "token_ids": tokens, "logprobs": logprobs}


class _Handler(BaseHTTPRequestHandler):
    vllm: VLLMServer

    def do_GET(self):
        self._answer(self.vllm.get(self.path.split("?")[0]))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            answer = self.vllm.post(self.path, json.loads(body or b"{}"))
        except Exception as error:
            self._answer({"error": repr(error)}, 400)
        else:
            self._answer(answer)

    def _answer(self, answer, status=200):
        body = json.dumps({} if answer is None else answer).encode()
        self.send_response(404 if answer is None else status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def satisfy_import_gates(monkeypatch, server):
    """Gives TRL's vLLM modules the names that they would have imported, until the test ends."""
    exceptions = SimpleNamespace(RequestException=RequestException)
    names = {
        "requests": SimpleNamespace(Session=Session, get=_request, exceptions=exceptions),
        "HTTPAdapter": lambda **options: None,
        "Retry": lambda **options: None,
        "is_requests_available": lambda: True,
        "is_vllm_available": lambda min_version=None: True,
        "get_ip": lambda: "127.0.0.1",
        "open_trainer_endpoint": lambda info: SimpleNamespace(group=SimpleNamespace()),
        "packed_nccl_broadcast_producer": server.receive,
        "_HAS_STATEFUL_TRAINER_ENGINE": True,
        "_HAS_RESET_PREFIX_CACHE_SUCCESS": True,
    }
    for name, value in names.items():
        monkeypatch.setattr(vllm_client, name, value, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    real = vllm_client.VLLMClient.init_communicator
    # "cuda" without an index names the current device: nothing is asked of a driver.
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: real(self, "cuda"))


class ColocatedLLM:
    """`vllm.LLM` as TRL's colocate mode uses it, over a [`VLLMServer`] that is never asked over HTTP.

    Attributes:
        loaded: Names and shapes of the weights, in the order they were loaded.
    """

    def __init__(self, server, **options):
        self.server, self.loaded = server, []
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        executor = SimpleNamespace(driver_worker=runner)
        config = SimpleNamespace(max_model_len=128)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)

    def load_weights(self, weights):
        own = dict(self.server.model.named_parameters())
        for name, value in weights:
            self.loaded.append((name, tuple(value.shape)))
            with torch.no_grad():
                own[name].copy_(value)

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling_params, use_tqdm):
        outputs = []
        for prompt in prompts:
            body = {**vars(sampling_params), "prompt": [prompt["prompt_token_ids"]]}
            (choice,) = self.server.complete(body)
            pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            logprobs = [{token: SimpleNamespace(rank=1, logprob=value)} for token, value in pairs]
            completion = SimpleNamespace(token_ids=choice["token_ids"], logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[completion]))
        return outputs


def colocate(monkeypatch, server):
    """Makes TRL's colocate mode run on `server`; returns the list of the engines it makes."""
    engines = []
    names = {
        "LLM": lambda **options: engines.append(ColocatedLLM(server, **options)) or engines[-1],
        "SamplingParams": SimpleNamespace,
        "is_vllm_available": lambda: True,
    }
    for name, value in names.items():
        monkeypatch.setattr(vllm_generation, name, value, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # TRL sets them: noted here, they go when the test ends
        monkeypatch.delenv(name)
    return engines
