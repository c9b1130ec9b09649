// Portkey's gateway has no option for its address: every listener is bound to loopback.
const net = require("node:net");

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (first, ...rest) {
  if (first !== null && typeof first === "object") {
    return listen.call(this, { ...first, host: "127.0.0.1" }, ...rest);
  }
  const callback = rest.find((argument) => typeof argument === "function");
  return listen.call(this, { port: first, host: "127.0.0.1" }, callback);
};
